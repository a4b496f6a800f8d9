"""The four services of the mesh, side by side: they meet only on the contracts in protos/ and never import each other."""
