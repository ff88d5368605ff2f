"""The one streaming driver: plan, then read, transform and write each tensor, then finish. Quantizing and every export run through it."""
