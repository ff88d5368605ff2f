"""The command line as a program of its own, with waits that a test can afford."""

from __future__ import annotations

import signal
import time

from pqweights_cli.main import main

from pqweights.hub import client

client.FIRST_WAIT_SECONDS = 0.05
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.05))  # the official client's

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what it runs in the background
    main()
