"""Where models come from and are kept: sources, downloads, bundles, EDGELLM_HOME."""
