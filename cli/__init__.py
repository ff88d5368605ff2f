"""The command line of pqweights: each command parses, makes one library call, and prints."""
