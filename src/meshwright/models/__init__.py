"""The models: decoder, mixture of experts, ResNet, and their layers."""
