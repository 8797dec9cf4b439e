"""GLM-4.7 (``glm4_moe``): grouped-query attention, mixture of experts, one multi-token-prediction layer."""
