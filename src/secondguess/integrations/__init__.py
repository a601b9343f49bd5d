"""Other engines and libraries."""
