"""Models on a text: perplexity, how far they are from a reference, and how fast they write."""
