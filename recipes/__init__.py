"""The recipes that come with pqweights, one YAML file each; README.md beside this file says what they are for."""
