"""How a head is computed: plain arithmetic over a Head, no graph and no tensor."""
