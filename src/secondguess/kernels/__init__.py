"""Matrix products for the few rows of a verify pass, with weights kept in fewer bits."""
