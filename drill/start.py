"""What starts the servers here, as systemd does elsewhere: `python -m drill.start rabbitmq DIRECTORY`."""

from __future__ import annotations

import sys
from pathlib import Path

from services import Services

if __name__ == "__main__":
    name, directory = sys.argv[1:]
    # given={}: the addresses in the environment are those of these servers
    Services(Path(directory), given={}).servers[name].start()
