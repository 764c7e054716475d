"""Each network has its own optimizer and its own scaler, so each is updated."""

import torch


class Pair:
    def __init__(self, actor, critic):
        self.actor, self.critic = actor, critic
        self.actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-4)
        self.critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
        self.actor_scaler = torch.amp.GradScaler("cuda")
        self.critic_scaler = torch.amp.GradScaler("cuda")

    def update(self, states, actions, returns):
        with torch.autocast("cuda", dtype=torch.float16):
            critic_loss = (self.critic(states, actions) - returns).square().mean()
        self.critic_optimizer.zero_grad()
        self.critic_scaler.scale(critic_loss).backward()
        self.critic_scaler.unscale_(self.critic_optimizer)
        torch.nn.utils.clip_grad_norm_(self.critic.parameters(), 1.0)
        self.critic_scaler.step(self.critic_optimizer)
        self.critic_scaler.update()

        with torch.autocast("cuda", dtype=torch.float16):
            actor_loss = -self.critic(states, self.actor(states)).mean()
        self.actor_optimizer.zero_grad()
        self.actor_scaler.scale(actor_loss).backward()
        self.actor_scaler.step(self.actor_optimizer)
        self.actor_scaler.update()
