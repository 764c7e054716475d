"""An optimizer that needs a closure runs in fp32, without a scaler."""

import torch


def fit(model, inputs, targets, steps=20):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=10, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return model
