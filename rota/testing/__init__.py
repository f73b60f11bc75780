"""What rota's own tests, and the authors of plug-ins, test with."""
