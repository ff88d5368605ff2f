"""Publishing a result: its model card, and sending it to the Hub."""
