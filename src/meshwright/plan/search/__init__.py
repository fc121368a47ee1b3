"""The search over layouts: every legal one as columns, its price, the best, and why the others lost."""
