"""A Pyro model as a function: its log joint, its potential energy, its minibatches, its gradient."""
