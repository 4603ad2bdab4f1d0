"""Cost models that plan: exported networks and others, behind one protocol."""
