"""Who decodes what: policies that read, one ledger that writes."""
