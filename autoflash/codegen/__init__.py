"""From a Variant to a file of source that can be imported."""
