"""Record the work of this build."""

import json

from tests.block_counts import cases

if __name__ == "__main__":
    read = cases.counter()
    counts = {name: cases.measure(case, read) for name, case in cases.CASES.items()}
    records = cases.records() | {cases.machine(): counts}
    cases.RECORDS.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
