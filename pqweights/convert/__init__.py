"""The streaming rewrite that quantizing and every export run through: plan, stream each tensor, finish."""
