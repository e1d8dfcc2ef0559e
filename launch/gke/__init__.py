"""TPU slices of a GKE cluster, as JobSets through xpk."""
