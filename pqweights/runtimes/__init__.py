"""Models as the libraries compute them that their folders are meant for."""
