"""The Hugging Face Hub: what repositories hold, fetching and uploading their files, and reading models from them.

A repository is read file by file as it is needed (storage.py), or fetched into the cache (sources.py).
"""
