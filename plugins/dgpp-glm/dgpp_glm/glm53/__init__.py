"""GLM-5.3 (``glm_moe_dsa``): latent attention to keys that an indexer chooses, mixture of experts, one MTP layer."""
