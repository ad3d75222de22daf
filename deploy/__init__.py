"""How glmserve is put on a machine: models, the local launcher, the command line."""
