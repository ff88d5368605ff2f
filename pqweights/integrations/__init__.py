"""Where pqweights meets the libraries that run models: one module each, which imports that library."""
