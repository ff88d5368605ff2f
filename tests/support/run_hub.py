"""The command line as a program of its own, with waits that a test can afford."""

from __future__ import annotations

import signal
import time

from pqweights_cli.main import main

from pqweights.storage import requests

requests.FIRST_WAIT_SECONDS = 0.05
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.05))  # in the official client

if __name__ == "__main__":
    # A shell ignores SIGINT for what it runs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
