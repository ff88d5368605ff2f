"""What every package may use: strict JSON and typed documents, dtypes, memory, units, notices."""
