# One with two Gaudi servers in a cluster; what asks the cluster itself is left out.
# docs/kubernetes.md
gaudi-bert run wiki.yaml --render manifests-wiki
# docs/recipes.md
gaudi-bert run wiki.yaml --on kubernetes --dry-run
