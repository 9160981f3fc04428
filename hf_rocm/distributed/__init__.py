"""What several ranks agree on before they load one model together, and who of them speaks."""
