"""The Hugging Face Hub: reading repositories (client.py, storage.py) in whole or as they are needed."""
