"""Everything that is decided from headers: roles, recipes, plans, and fitting to a size."""
