"""The dispatch thresholds and schedule tables, in the form that engines write by hand."""
