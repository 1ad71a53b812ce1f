"""`python -m cuep bench`: times dispatch and combine, variants side by side, checked against the oracle."""
