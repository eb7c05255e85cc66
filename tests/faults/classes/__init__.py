"""Classes of faults, one file per kind of place that is changed; found by a scan for CLASSES."""
