"""Text from a model, token by token: a continuation of a prompt, or the model's turn in a conversation."""
