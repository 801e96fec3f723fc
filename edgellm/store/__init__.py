"""Model sources, downloads, exported bundles and the folder EDGELLM_HOME that holds them."""
