"""Masters in the libraries that run models: torch and transformers, which are imported here and nowhere below."""
