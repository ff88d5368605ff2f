"""The command line as `python -m pqweights_cli`, and as the console script: interrupts are answered from the start."""

from __future__ import annotations

from . import interrupts


def main() -> None:
    """Run the command line."""
    interrupts.answer_at_once()
    from .main import main as run

    run()


if __name__ == "__main__":
    main()
