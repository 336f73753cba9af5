#!/usr/bin/env bash
# Sets up, checks and measures on a machine with NVIDIA GPUs, in about 15 minutes, or parts of it:
#     bench/gpu/run.sh [FOLDER [PART...]]
# Needs localbatch with llama-cpp-python built for CUDA, llama-server and llama-batched-bench of the
# same llama.cpp on PATH, the packages gguf and nvidia-ml-py, and torch with transformers for those.
set -u
cd "$(dirname "$0")/../.."
folder=${1:-/tmp/localbatch-gpu}
shift
parts=(${@:-machine small peers cards large split sizes})
mkdir -p "$folder"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
one=(--set devices=CUDA0)
lb() { timeout 120 python3 bench/gpu/localbatch_peer.py "$@"; }
peer() { CUDA_VISIBLE_DEVICES=0 timeout 200 python3 bench/gpu/transformers_peer.py "$@" --shape tinyllama-1.1b; }
server() {
    CUDA_VISIBLE_DEVICES=0 python3 bench/compare.py --model "$small" --systems server \
        --server "$(command -v llama-server)" --rounds 1 --threads 8 --workload "$@"
}
raw() {
    CUDA_VISIBLE_DEVICES=0 llama-batched-bench -ngl 99 -b 2048 -ub 2048 -fa on "$@" 2>&1 | grep '|'
}

small=$folder/tinyllama.gguf large=$folder/llama8b.gguf
model() { [ -e "$1" ] || python3 bench/gpu/models.py "$@"; }
rows() { [ -e "$folder/$1.jsonl" ] || python3 bench/gpu/rows.py "$folder/$1.jsonl" "${@:2}"; }
model "$small" --shape tinyllama-1.1b
rows even; rows few --rows 64; rows even2k --rows 2048; rows even4k --rows 4096
rows tail --out 8-512; rows tail2k --rows 2048 --out 8-512; rows long --prompt 32 --out 256
rows alike --prompt 512 --alike 448 --out 64

machine() {
    python3 -m localbatch doctor
    python3 -m pytest -q -p no:cacheprovider tests/test_gpu.py
}

small() { # the small model on one card
    for lanes in 4 3 2; do lb "$small" "$folder/even.jsonl" "${one[@]}" --set lanes=$lanes --times 4; done
    lb "$small" "$folder/even.jsonl" "${one[@]}" --set lanes=2 --set parallel=496
    for name in tail even2k tail2k alike; do lb "$small" "$folder/$name.jsonl" "${one[@]}"; done
    lb "$small" "$folder/alike.jsonl" "${one[@]}" --set share_prefixes=false
    lb "$small" "$folder/even.jsonl" "${one[@]}" --temperature 0.8
    raw -m "$small" -npp 128 -ntg 128 -npl 128,256 -c 65536
}

peers() { # beside small() of the same machine
    server "$folder/even.jsonl" --server-grid gpu --search-rows 256
    server "$folder/tail.jsonl" --server-best slots=256,unified=false,flash=true
    peer "$folder/even.jsonl" --batches 256,512
    peer "$folder/tail.jsonl" --batches 256,512 --times 1
    peer "$folder/tail.jsonl" --continuous --attention 'paged|sdpa' --times 1
}

cards() { # one of them and all
    lb "$small" "$folder/even4k.jsonl" "${one[@]}" --times 2
    lb "$small" "$folder/even4k.jsonl" --times 2
    lb "$small" "$folder/tail2k.jsonl" "${one[@]}" --times 2
    lb "$small" "$folder/tail2k.jsonl" --times 2
}

large() { # the large model on one card
    model "$large" --shape llama-8b --kind q4_k_m
    lb "$large" "$folder/even.jsonl" "${one[@]}" --times 2
    lb "$large" "$folder/long.jsonl" "${one[@]}" --times 2
    lb "$large" "$folder/long.jsonl" "${one[@]}" --set parallel=256 --times 2
    raw -m "$large" -npp 128 -ntg 128 -npl 256 -c 65536
    raw -m "$large" -npp 32 -ntg 256 -npl 256 -c 73728
}

split() { # over all cards by layers, and partly on one
    lb "$small" "$folder/even.jsonl" --set split_mode=layer --times 2
    lb "$small" "$folder/few.jsonl" "${one[@]}" --set gpu_layers=11 --times 2
}

sizes() { # of a batch
    python3 -m localbatch sweep "$small" --sizes 1,2,4,8,16,32,64,128,256,512,1024 --prompt-tokens 64 \
        --max-tokens 50 --schemes continuous --kv-layout streams --rounds 1
}

for part in "${parts[@]}"; do
    echo "## $part"
    "$part"
done
