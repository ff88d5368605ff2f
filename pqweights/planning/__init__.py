"""Everything that is decided from headers: roles, recipes, plans, and bit widths that fit a size."""
