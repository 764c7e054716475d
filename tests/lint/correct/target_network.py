"""The target network follows every so many episodes, apart from the steps."""

import torch


class Agent:
    def __init__(self, network, target, memory):
        self.network, self.target, self.memory = network, target, memory
        self.target.load_state_dict(network.state_dict())
        self.optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler("cuda")

    def learn(self, gamma=0.99):
        states, actions, rewards, following = self.memory.sample()
        with torch.autocast("cuda", dtype=torch.float16):
            values = self.network(states).gather(1, actions)
            with torch.no_grad():
                wanted = rewards + gamma * self.target(following).max(1, keepdim=True).values
            loss = torch.nn.functional.smooth_l1_loss(values, wanted)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def play(self, environment, episodes):
        for episode in range(episodes):
            environment.run(self.network)
            for _ in range(64):
                self.learn()
            if episode % 10 == 0:
                self.target.load_state_dict(self.network.state_dict())
