"""Shows a file of answers: python examples/show.py answers.jsonl."""

import json
import shutil
import sys
import textwrap

width = min(shutil.get_terminal_size().columns, 100)
with open(sys.argv[1], encoding="utf-8") as answers:
    for line in answers:
        row = json.loads(line)
        text = row["text"] if row["text"] is not None else f"ERROR {row['error']['message']}"
        print(f"\n{row['id']} ({row['finish_reason']}, {row['usage']['completion_tokens']} tokens)")
        for paragraph in text.splitlines():
            print(textwrap.fill(paragraph, width, initial_indent="  ", subsequent_indent="  "))
