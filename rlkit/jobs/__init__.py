"""A run and its paperwork: parameters, folders, plans, tables and figures."""
