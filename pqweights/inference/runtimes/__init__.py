"""Models, each loaded and computed by the library that its folder is meant for."""
