"""`python -m bench resize_batch` and `python -m bench alibi_attention`: measure, write a record, print a table."""

from __future__ import annotations

import argparse

from . import bench_alibi_attention, bench_resize_batch
from .measure import table, write

BENCHMARKS = {"resize_batch": bench_resize_batch.run, "alibi_attention": bench_alibi_attention.run}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("operator", choices=BENCHMARKS)
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time of each row of the table")
    arguments = parser.parse_args()
    records = BENCHMARKS[arguments.operator](arguments.seconds)
    path = write(f"cpu_{arguments.operator}", records)
    print(f"{table(records)}\n\nwritten to {path}")


if __name__ == "__main__":
    main()
