"""Shows an index of summaries: python examples/show_index.py summaries/index.jsonl."""

import json
import shutil
import sys
import textwrap

width = min(shutil.get_terminal_size().columns, 100)
with open(sys.argv[1], encoding="utf-8") as index:
    for line in index:
        row = json.loads(line)
        size = f"{row['words']:,} words, {row['chunks']} chunks, {row['levels']} levels of merges"
        print(f"\n{row['name']} ({size if row['error'] is None else 'not summarized'})")
        for paragraph in (row["error"] or row["summary"]).splitlines():
            print(textwrap.fill(paragraph, width, initial_indent="  ", subsequent_indent="  "))
        for warning in row["warnings"]:
            print(textwrap.fill(f"Check it: it {warning}", width, subsequent_indent="  "))
