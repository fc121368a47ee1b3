"""Pipeline parallel: runs the actions of a schedule as they are written."""
