"""A program that shows a search on the terminal it is started in: some events, and then a trial that doesn't end.

With the argument `ends` the trial ends, and so does the search.
"""

import os
import sys
import time

from rich.console import Console
from search_events import make_ended, make_started

from autotune.output.progress import Progress
from autotune.values.problem import Note

if __name__ == "__main__":
    try:
        with Progress(Console(stderr=True)) as progress:
            progress(Note(text="tuning for the CPU"))
            progress(make_ended(6, outcome=34.2))
            progress(make_started(7))
            if "ends" in sys.argv:
                progress(make_ended(7))
            else:
                os.write(1, b"\x1b]2;waiting\a")  # as the window's title: this thread draws no more
                time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted")
    print("the answer")
