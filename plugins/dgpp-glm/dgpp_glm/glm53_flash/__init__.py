"""GLM-5.3-Flash (``glm5_next``), text: delta attention, latent attention to chosen blocks, four residual streams."""
