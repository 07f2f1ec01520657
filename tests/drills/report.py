"""Prints the figures of all drills as a table: ``python report.py output/drills.jsonl``."""

import json
import sys
from collections import defaultdict

NAMES = {
    "kill": "a rank is killed (SIGKILL)",
    "leave": "a rank exits early",
    "fail": "exception in place of a forward or a backward",
    "fail_backward": "exception inside a backward",
    "fail_loss": "exception in the loss",
    "fail_data": "exception in the data iterator",
    "sleep": "a rank sleeps for 30 s within the limit: survived",
    "hang": "a rank hangs for longer than the limit (3 s or 5 s; it ends by itself 9 s or 14 s after)",
    "wrong_size": "a message of the wrong size",
    "cut_the_network": "the network between two hosts is cut (limit 10 s)",
    "none": "two hosts with 5 ms latency; a full disk while tracing: survived",
}


def main(path):
    drills = defaultdict(list)
    with open(path) as file:
        for line in map(json.loads, file):
            drills[line["fault"]].append(line)
    print("| fault | tried | slowest rank's error after, s (worst drill) | all processes ended after, s (worst drill) |")
    print("|---|---|---|---|")
    for fault, name in NAMES.items():
        if drills[fault]:
            slowest, end = (max(drill[key] for drill in drills[fault]) for key in ("slowest error", "end"))
            print(f"| {name} | {len(drills[fault])} | {slowest:.1f} | {end:.1f} |")


if __name__ == "__main__":
    main(sys.argv[1])
