"""What every package may use: strict JSON and typed documents, dtypes, units, advice, what threads share."""
